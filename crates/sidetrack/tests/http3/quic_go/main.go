// Command peer is HTTP/3 and CONNECT-UDP (RFC 9298) by quic-go, for the tests of Sidetrack.
//
//	peer serve ADDRESS IDENTITY         a server of HTTP/3; "/big" has 300,000 bytes
//	peer proxy ADDRESS IDENTITY         a proxy of CONNECT-UDP over HTTP/3
//	peer get CA URL                     asks a server by HTTP/3
//	peer echo CA PROXY ADDRESS          sends datagrams to an echo server through a proxy
//	peer through CA PROXY CA2 URL       asks a server by HTTP/3 through a proxy
//
// Servers print their address. Every client prints what it got, or fails.
package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
)

// limit is how long a client waits for everything.
const limit = 60 * time.Second

// where is the path of a proxy (RFC 9298 Sec. 2).
const where = "/.well-known/masque/udp/"

func main() {
	arguments := map[string]func(context.Context, []string) error{
		"serve": serve, "proxy": proxy, "get": get, "echo": echo, "through": through,
	}
	if len(os.Args) < 4 || arguments[os.Args[1]] == nil {
		log.Fatal("usage: peer serve|proxy|get|echo|through ARGUMENTS")
	}
	ctx := context.Background()
	if os.Args[1] != "serve" && os.Args[1] != "proxy" {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	}
	if err := arguments[os.Args[1]](ctx, os.Args[2:]); err != nil {
		log.Fatal(err)
	}
}

func listen(address, identity string, handler http.Handler) error {
	certificate, err := tls.LoadX509KeyPair(identity, identity)
	if err != nil {
		return err
	}
	socket, err := net.ListenPacket("udp", address)
	if err != nil {
		return err
	}
	fmt.Println(socket.LocalAddr())
	server := http3.Server{
		TLSConfig:       http3.ConfigureTLSConfig(&tls.Config{Certificates: []tls.Certificate{certificate}}),
		EnableDatagrams: true,
		Handler:         handler,
	}
	return server.Serve(socket)
}

func serve(_ context.Context, arguments []string) error {
	return listen(arguments[0], arguments[1], http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/big" {
			w.Write(bytes.Repeat([]byte("x"), 300_000))
			return
		}
		fmt.Fprintf(w, "%s %s from %s", r.Method, r.URL.Path, r.RemoteAddr)
	}))
}

func proxy(_ context.Context, arguments []string) error {
	return listen(arguments[0], arguments[1], http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		parts := strings.Split(strings.TrimPrefix(r.URL.EscapedPath(), where), "/")
		if r.Method != http.MethodConnect || r.Proto != "connect-udp" || len(parts) != 3 {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		host, err := url.PathUnescape(parts[0])
		if err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		out, err := net.Dial("udp", net.JoinHostPort(host, parts[1]))
		if err != nil {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		defer out.Close()
		w.Header().Set(http3.CapsuleProtocolHeader, "?1")
		w.WriteHeader(http.StatusOK)
		stream, err := w.(http3.HTTPStreamer).HTTPStream()
		if err != nil {
			log.Print(err)
			return
		}
		defer stream.Close()
		go func() {
			buffer := make([]byte, 65_536)
			for {
				length, err := out.Read(buffer[1:])
				if errors.Is(err, net.ErrClosed) {
					return
				}
				if err == nil {
					// What is too long for a datagram is lost, as on a path with such an MTU.
					stream.SendDatagram(buffer[:1+length])
				}
			}
		}()
		// The end of the stream ends the datagrams.
		go func() {
			io.Copy(io.Discard, stream)
			stream.CancelRead(quic.StreamErrorCode(http3.ErrCodeNoError))
			out.Close()
		}()
		for {
			datagram, err := stream.ReceiveDatagram(r.Context())
			if err != nil {
				return
			}
			// Context 0 is a payload of UDP.
			if len(datagram) > 0 && datagram[0] == 0 {
				out.Write(datagram[1:])
			}
		}
	}))
}

func trust(ca string) (*tls.Config, error) {
	text, err := os.ReadFile(ca)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s: no certificate", ca)
	}
	return &tls.Config{RootCAs: pool}, nil
}

func ask(ctx context.Context, transport *http3.Transport, url string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return err
	}
	content, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	fmt.Println(response.Proto, response.StatusCode, len(content))
	if len(content) < 1000 {
		fmt.Println(string(content))
	}
	return nil
}

func get(ctx context.Context, arguments []string) error {
	trusted, err := trust(arguments[0])
	if err != nil {
		return err
	}
	transport := &http3.Transport{TLSClientConfig: trusted}
	defer transport.Close()
	return ask(ctx, transport, arguments[1])
}

// tunnel is a way to one destination through a proxy.
type tunnel struct {
	*http3.RequestStream
	to         net.Addr
	connection *quic.Conn
	reading    context.Context
	stop       context.CancelFunc
}

func open(ctx context.Context, ca, proxy, destination string) (*tunnel, error) {
	trusted, err := trust(ca)
	if err != nil {
		return nil, err
	}
	trusted.NextProtos = []string{http3.NextProtoH3}
	// Packets of 1,350 bytes carry the 1,200 bytes of a QUIC client's first packets.
	config := &quic.Config{EnableDatagrams: true, InitialPacketSize: 1350}
	connection, err := quic.DialAddr(ctx, proxy, trusted, config)
	if err != nil {
		return nil, err
	}
	transport := &http3.Transport{EnableDatagrams: true}
	client := transport.NewClientConn(connection)
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-client.ReceivedSettings():
	}
	if settings := client.Settings(); !settings.EnableExtendedConnect || !settings.EnableDatagrams {
		return nil, fmt.Errorf("the proxy has other settings: %+v", settings)
	}
	to, err := net.ResolveUDPAddr("udp", destination)
	if err != nil {
		return nil, err
	}
	host, port, _ := net.SplitHostPort(destination)
	address := fmt.Sprintf("https://%s%s%s/%s/", proxy, where, strings.ReplaceAll(host, ":", "%3A"), port)
	request, err := http.NewRequestWithContext(ctx, http.MethodConnect, address, nil)
	if err != nil {
		return nil, err
	}
	request.Proto = "connect-udp"
	request.Header.Set(http3.CapsuleProtocolHeader, "?1")
	stream, err := client.OpenRequestStream(ctx)
	if err != nil {
		return nil, err
	}
	if err := stream.SendRequestHeader(request); err != nil {
		return nil, err
	}
	response, err := stream.ReadResponse()
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the proxy says %s", response.Status)
	}
	reading, stop := context.WithCancel(ctx)
	return &tunnel{stream, to, connection, reading, stop}, nil
}

func (t *tunnel) LocalAddr() net.Addr { return &net.UDPAddr{} }

// SetReadDeadline ends the reading: quic-go asks for that when its connection is over.
func (t *tunnel) SetReadDeadline(time.Time) error {
	t.stop()
	return nil
}

func (t *tunnel) WriteTo(payload []byte, _ net.Addr) (int, error) {
	return len(payload), t.SendDatagram(append([]byte{0}, payload...))
}

func (t *tunnel) ReadFrom(buffer []byte) (int, net.Addr, error) {
	for {
		datagram, err := t.ReceiveDatagram(t.reading)
		if err != nil {
			return 0, nil, err
		}
		if len(datagram) > 0 && datagram[0] == 0 {
			return copy(buffer, datagram[1:]), t.to, nil
		}
	}
}

// end closes the stream, waits until the proxy has closed it too, and closes the connection.
func (t *tunnel) end() error {
	if err := t.RequestStream.Close(); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, t); err != nil {
		return err
	}
	return t.connection.CloseWithError(quic.ApplicationErrorCode(http3.ErrCodeNoError), "")
}

func echo(ctx context.Context, arguments []string) error {
	way, err := open(ctx, arguments[0], arguments[1], arguments[2])
	if err != nil {
		return err
	}
	for _, length := range []int{0, 1, 500, 1200} {
		payload := bytes.Repeat([]byte{byte(length)}, length)
		if _, err := way.WriteTo(payload, nil); err != nil {
			return fmt.Errorf("%d bytes: %w", length, err)
		}
		datagram, err := way.ReceiveDatagram(ctx)
		if err != nil {
			return fmt.Errorf("%d bytes: %w", length, err)
		}
		if !bytes.Equal(datagram, append([]byte{0}, payload...)) {
			return fmt.Errorf("%d bytes: %d came", length, len(datagram))
		}
		fmt.Println(length)
	}
	return way.end()
}

func through(ctx context.Context, arguments []string) error {
	target, err := url.Parse(arguments[3])
	if err != nil {
		return err
	}
	way, err := open(ctx, arguments[0], arguments[1], target.Host)
	if err != nil {
		return err
	}
	trusted, err := trust(arguments[2])
	if err != nil {
		return err
	}
	transport := &http3.Transport{TLSClientConfig: trusted}
	transport.Dial = func(ctx context.Context, _ string, tlsConfig *tls.Config, config *quic.Config) (*quic.Conn, error) {
		config = config.Clone()
		config.DisablePathMTUDiscovery = true
		return quic.Dial(ctx, way, way.to, tlsConfig, config)
	}
	if err := ask(ctx, transport, arguments[3]); err != nil {
		return err
	}
	transport.Close()
	return way.end()
}
